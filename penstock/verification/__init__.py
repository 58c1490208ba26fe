"""Compare what our adapters give with what the reference library of a family gives, on texts made for it."""
