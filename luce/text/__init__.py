"""Text on both sides of the engine: strings to token ids and back, and conversations to prompts.

Not here: request and response bodies (server) and choosing tokens (engine). Called by server, api, assembly and cli.

    tokenizer         the tokenizer that a GGUF file's metadata describes
    detokenizer       ids to whole characters
    output            the text of a reply: stop strings, text that is held back
    reasoning         separates reasoning from content in a reply; channel_splitter: in one of several channels
    reply_parser      the parts of a reply: reasoning, text, and calls of tools
    call_memory       the ids of past calls, by what the calls mean and where they stand
    call_parser       the calls in a reply's text, in the model's dialect; call_cursor: where it reads,
                      call_arguments: arguments that are no JSON, parameter_types: their types and values
    json_reader       JSON that arrives in pieces
    marks             special tokens as single characters, so that text that spells one is not taken for it
    reply_format      what a request wants its reply to be
    plain_schema      JSON schemas as the grammar library takes them;
                      schema_arms, schema_limits, schema_pattern: what it asks of arms, sizes, regular expressions,
                      schema_refs: what references lead to
    gbnf              llama.cpp's grammars in Lark
    reply_grammar     the grammar of a format
    call_format       which calls of tools a reply may hold, or must
    call_grammar      the grammar of calls, from a dialect's record; call_values: of arguments that are no JSON object,
                      channel_grammar: what a reply of channels has around its calls or its body
    lark              pieces of grammars
    grammar_library   llguidance: grammars to the tokens that may come
    grammar           compiles grammars and makes constraints of them; compile_slots: few at a time
    constraint        a grammar's state behind the tokens of a reply; digit_limit: ends the numbers of JSON,
                      free_text: rows in texts, whose mask is constant
    template          chat templates, rendered by a child process
    template_child    the server's end of that process; template_process: the process itself
    chat              conversations to prompts; plain_messages: a client's messages as templates take them
    tool_history      tools, past calls and results as a template takes them
    prompt_compression  a prompt as the target reads it: compressed, or whole
    protected         the tokens of a prompt that compression always keeps
    cut_points        where a text may be cut
    fim               tokens and prompts for filling in the middle
    boundaries        lengths at which prompts diverge
    token_memory      the ids of the texts of earlier replies
    retokenize        ids of one vocabulary to ids of another
"""
