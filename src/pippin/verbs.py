"""Every command and what it does, in the order of the help; imports nothing."""

COMMANDS = {
    "check": "whether this device computes what it should, before anything is trained on it",
    "run": "every stage of a recipe, from the model to the deployed file",
    "plan": "what a run will do, need and refuse, before any work",
    "data": "the rows as the model sees them: trained tokens, lengths, what is cut",
    "train": "train the adapter (or every weight)",
    "merge": "merge the adapter into the original weights",
    "quantize": "make the merged model small",
    "qat": "go on training with the small model: its scales follow the loss",
    "evaluate": "measure every stage that is there against its parent",
    "deploy": "write the files that leave this machine",
    "generate": "answer one prompt with a model, a stage's folder or a recipe's result",
    "chat": "talk with a model, a stage's folder or a recipe's result",
    "serve": "serve a model, a stage's folder or a recipe's result to OpenAI's clients",
    "report": "write report.html of a run again",
    "version": "pippin's version and those of what it runs on",
}


def sentence(name: str) -> str:
    """What a command does, as its own help says it."""
    return COMMANDS[name][0].upper() + COMMANDS[name][1:] + "."


def help_text() -> str:
    """What `pippin --help` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        (
            "Usage: pippin COMMAND [OPTIONS] ...",
            "",
            "Adapt an open language model, shrink it, ship it, and prove that nothing was lost.",
            "",
            *lines,
            "",
            "`pippin COMMAND --help` explains one. A first run: pippin run recipes/sql.toml",
        )
    )
