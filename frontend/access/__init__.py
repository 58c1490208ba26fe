"""Who may call what, and how often: API keys, scopes, rates, shares.

1. `keys` makes a key and its hash; `keyfile` reads the file of hashed keys, with every mistake named.
2. `credentials` finds the key in the head of a request, `rules` says which scope a path needs.
3. `keyless` says what is let in where there are no keys.
4. `gate` puts them together: a `Grant` or an error of `ipc.errors`, before anything but the head is read.
5. `rates` is the clock of each key's rate, one for all frontends.
"""
