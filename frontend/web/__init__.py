"""Requests to servers of others: files and pages by URL, web search, the text of pages.

Imported by `frontend.agent` and by whoever reads URLs of requests.
"""
