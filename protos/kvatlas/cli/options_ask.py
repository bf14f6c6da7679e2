"""Options of the commands that ask the model: generate, chat."""

from kvatlas.cli.option import JSON, SAMPLING, Argument, Command, Option

CONSTRAINTS = (
    Option("json_schema", str, "the answer must be JSON of the schema in this file", "", metavar="FILE"),
    Option("regex", str, "the whole answer must match", "", metavar="PATTERN"),
    Option("grammar", str, "the answer must be of the grammar in this file", "", metavar="FILE"),
    Option("choice", str, "the answer must be one of these (repeatable)", is_list=True, metavar="TEXT"),
)
"""At most one of them."""

GENERATE = Command(
    "generate",
    "complete a prompt",
    "Streams the answer to stdout; tokens, speed and what the prefix cache had go to stderr.",
    (
        "kvatlas generate 'The sky is' -n 20 -t 0",
        "echo 'Three uses of a page table:' | kvatlas generate --chat",
        "kvatlas generate 'Pick a colour:' --samples 4 --seed 7 --json | jq -r '.choices[].text'",
        "kvatlas generate --chat 'A person, as JSON.' --json-schema person.schema.json -n 200",
        "kvatlas generate --chat 'Is the sky blue?' --choice yes --choice no",
    ),
    (
        *SAMPLING,
        Option("chat", bool, "send the prompt as the user's turn of a chat", False),
        Option("system", str, "system turn of that chat (implies --chat)", "", metavar="TEXT"),
        *CONSTRAINTS,
        Option(
            "tools",
            str,
            "JSON file of function declarations (implies --chat)",
            "",
            metavar="FILE",
        ),
        Option(
            "template_args",
            str,
            "JSON for the chat template (implies --chat)",
            "",
            metavar="JSON",
        ),
        Option("token_ids", bool, "the prompt is token ids, divided by blanks or commas", False),
        Option("samples", int, "answers drawn from the same prompt; they share its pages"),
        Option("logprobs", int, "log-probabilities with N alternatives (with --json)"),
        Option("prompt_logprobs", int, "the same for the prompt; turns the prefix cache off (with --json)"),
        Option("output", str, "what comes back", "text", choices=("text", "token_ids", "both")),
        Option("skip_special_tokens", bool, "leave special tokens out of the text", True),
        Option("model", str, "model id; needed where several are served", "", "m", "NAME"),
        Option("request_id", str, "id of the request; else the server makes one", "", metavar="ID"),
        JSON,
        Option("quiet", bool, "nothing on stderr but errors", False, "q"),
    ),
    (Argument("prompt", "the prompt; without it, or with -, stdin"),),
)

CHAT = Command(
    "chat",
    "talk with the model",
    "Streams answers and keeps the history. Lines that start with / are commands: /help lists them.\n"
    "Ctrl-C stops the answer, not the chat; Ctrl-D leaves. Reads questions line by line when piped.",
    (
        "kvatlas chat",
        "kvatlas chat 'Why is the sky blue?'           # one answer",
        "printf 'Hello!\\nSay it in French.\\n' | kvatlas chat --system 'Answer in one sentence.'",
    ),
    (
        *SAMPLING,
        Option("system", str, "system turn", "", metavar="TEXT"),
        Option("model", str, "model id; needed where several are served", "", "m", "NAME"),
        Option("quiet", bool, "nothing on stderr but errors", False, "q"),
    ),
    (Argument("message", "ask this, print the answer and leave"),),
)
