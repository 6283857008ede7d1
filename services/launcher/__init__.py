"""`sluiceway serve`: the five services as children of one process.

Pulls the model, starts the same ``python -m services.X`` that containers run, waits until they are
ready, keeps them alive and drains them in the end. An assembly: nothing imports it but the CLI.
"""
