"""`pagewire bench serve`: load on a running server, over gRPC or OpenAI's HTTP API, and what came of it.

lengths.py makes the prompts, arrivals.py the times at which they are sent, grpc_target.py and http_target.py send them,
run.py keeps the clock, results.py turns what was seen into figures under vLLM's names. Nothing here starts a server.
"""
