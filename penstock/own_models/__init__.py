"""Models that the catalog lacks, by path or hub id: their catalog entry is read from their own files.

For `penstock serve`, `check`, `worker` and `models`. No model library is imported.
"""
