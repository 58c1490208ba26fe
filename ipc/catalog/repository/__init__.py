"""Models of named tensors on disk: `<name>/config.pbtxt` or `config.yaml`, and `<name>/<version>/model.*`.

layout       directories, versions and files; what may not be followed
document     a configuration file as the message of its schema
conversion   that message as our `ModelConfig`, with every field checked
scheduling   the parts of it that say how requests are put together
labels       label files
entries      one catalog entry for each version that the policy chooses
overrides    configurations and files that loads by name brought
retaining    versions that stay until a newer one is loaded
opening      the catalog of the settings: catalog files and repositories together

A model that cannot be read is an entry too, whose load fails with the reason; it never keeps others from being served.
"""
