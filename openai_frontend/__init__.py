"""OpenAI's HTTP dialect in front of omni_bls: schemas, routers and a Triton client; loads no torch."""
