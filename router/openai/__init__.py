"""The HTTP door: OpenAI's API on the router's own event loop.

app.py has the routes, schema.py the bodies, asked.py turns one into the plain request that every door makes,
reply.py sends the answer, shapes.py writes it in OpenAI's words, errors.py the refusals, border.py is what every
call passes, server.py listens.
"""
