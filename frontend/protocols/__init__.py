"""One package per wire contract; each parses, calls the engine, and renders. None imports another."""
