"""gRPC: `moeflow.proto`, and its server, which answers each call as a request to the HTTP application."""
