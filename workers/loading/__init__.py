"""Getting a model onto this machine and saying clearly what went wrong when that fails."""
