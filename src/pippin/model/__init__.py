"""Models as files: where they come from, their config, weights, names, adapters, tokenizer."""
