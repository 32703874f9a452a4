"""One module per verb of the command line (`cli.py`), and what verbs share. Only these print."""
