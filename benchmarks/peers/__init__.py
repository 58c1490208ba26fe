"""Other inference servers with the same model, each in a virtual environment of its own."""
