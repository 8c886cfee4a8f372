"""The messages on the wire: generation.proto is public, worker.proto is between router and workers.

The *_pb2 modules beside this file are generated at install (setup.py, or `make protos`) and never committed.
Only the borders of the processes name them; tests/test_architecture.py holds the list.
"""
