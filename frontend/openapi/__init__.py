"""The schema of this server's HTTP surface: made from structs and a table of operations, shown at `/docs`."""
