"""Direct in-process loops: what the model costs with no server around it, each in a process of its own."""
