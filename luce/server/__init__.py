"""HTTP: an OpenAI-compatible server over one loaded model.

    app          routes, middlewares, start and stop order on one page
    state        the state that all handlers share: settings, keys, metrics, the model once it is loaded
    errors       error bodies, and errors of requests
    auth         keys, the Host check, CORS
    schema       request bodies: decoding, types, ranges
    prompt_reader  the prompts of a request, compressed if they may be
    prepare      a checked body to prompts and sampling values; runs in a worker thread
    structured_output  what a request wants its reply to be, by whichever field says it
    completions  the handlers of /v1/chat/completions and /v1/completions
    answer       the way of every request for replies: its job, the events of its sequences, its response
    replies      the sequences of one request, on the event loop
    choice       one reply of a request while it is generated
    response     the response to a job, whole or streamed: what every API shares;
                 openai_response: OpenAI's objects and chunks; chat_response and completion_response: of each endpoint
    messages     the handlers of /v1/messages; responses: those of /v1/responses. Each has modules for its bodies
                 (_request), for the chat that a body becomes (_chat, _items, _tools) and for its replies (_response)
    segments     a reply's parts as segments; content_blocks and output_items: as blocks and items with their events
    stream       server-sent events, with a limit for slow readers
    relay        streams in frames, and their records: a stream goes on at another server; stream_frames: the frames
    status       /health, /livez, /v1/models, /metrics
    codex_models the model in Codex's catalogue
    native       llama.cpp's /completion and /infill; native_request and native_response: their bodies and replies
    tokens       /tokenize, /detokenize, /apply-template
    slots        /slots: what each slot does
    cache        /v1/cache: lists and clears the prefix cache
    props        /props: settings and placement
    metrics      Prometheus counters
    static_files the web UI's files, which are in webui/
    sockets      listening sockets, own and inherited
    sdnotify     the service manager's datagrams

Not here: templates and tokens (text), choosing tokens (engine). Called by cli. The event loop never computes: decoding,
rendering, tokenising and large responses run in worker threads; the engine has a thread of its own.
"""
