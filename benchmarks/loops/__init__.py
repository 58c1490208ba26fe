"""Direct in-process loops: the cost of the model without a server, each loop in a process of its own."""
