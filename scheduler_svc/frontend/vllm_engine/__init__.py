"""`vllm.grpc.engine.VllmEngine`: the protocol by which inference gateways talk to engines, beside Tandem's own.

Converts that protocol's messages at the edge, once; the work is GenerationService's. Its messages and stubs come from
the package smg-grpc-proto.
"""
