"""One verb, one file, one entry function: a stage reads folders and writes a folder."""
