"""The page at `/` of the HTTP port: who works, what runs, how fast, and a box to chat with the model.

state.py says how things stand as JSON; index.html, style.css and app.js show it, without a build step or any asset of
another host. The charts read /metrics and the chat box calls /v1/chat/completions, as any other client would.
"""
