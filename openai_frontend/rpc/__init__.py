"""gRPC's client side on the event loop itself. grpcio's reads on threads: each message passes three of them."""
