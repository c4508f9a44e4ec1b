"""From files to batches of tokens: dataset.py, chat.py, batches.py."""
