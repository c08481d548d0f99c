"""Generated from proto/pdserve/rpc/v1 by tools/gen_proto.py. Do not edit."""
