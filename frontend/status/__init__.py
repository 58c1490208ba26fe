"""The state of the whole server, live: a WebSocket stream of JSON frames and the page that shows it.

1. `feed.Feed` builds a frame every 200 ms while somebody watches; all viewers of this frontend get the same text.
2. What a frame says comes from all workers (`Stats`, over the channels) and from all frontends (metric files and rings
   of recent requests in the run directory), so that every frontend says the same.
3. `stream.StreamResource` is `/ws/status`, `page.PageResource` is `/`.
"""
