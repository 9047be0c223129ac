"""HTTP: an OpenAI-compatible server over one loaded model.

    app          routes, middlewares, start and stop order on one page
    state        what all handlers share: settings, keys, metrics, the model once it is loaded
    errors       errors that only HTTP knows, and the error bodies
    auth         keys, the Host check, CORS
    schema       request bodies: decoding, types, ranges
    prepare      a checked body to prompts and sampling values; runs in a worker thread
    completions  the handlers of /v1/chat/completions and /v1/completions
    replies      the sequences of one request, seen from the event loop
    choice       one reply of a request while it grows
    shapes       OpenAI reply objects and stream chunks, as far as they are alike;
    chat_shape   those of /v1/chat/completions,
    text_shape   and those of /v1/completions
    stream       server-sent events with a limit on slow readers
    status       /health, /livez, /v1/models, /metrics
    cache        /v1/cache: what the prefix cache holds
    props        /props: settings and placement
    metrics      Prometheus counters
    sockets      listening sockets, own and inherited
    sdnotify     the service manager's datagrams

Not here: templates and tokens (text), choosing tokens (engine). Called by cli. The event loop never computes: decoding,
rendering, tokenising and large replies run in worker threads; the engine has a thread of its own.
"""
