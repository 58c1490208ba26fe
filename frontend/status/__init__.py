"""The live state of the whole server: frames of JSON over a WebSocket, and the page that shows the frames.

The application and the start of a frontend import this package.
"""
