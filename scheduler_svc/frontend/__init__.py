"""The frontend process: everything between a client's call and the core's queue, and back.

A request's way: service -> prompt (tokenize, chat template) -> validation -> generation -> core_link, and its tokens'
way back: core_link -> generation -> detokenizer (text, stop strings) -> service. A constrained one's grammar:
grammars -> grammar_compiler (grammar_check, matcher, thoughts) -> constraint, which gives core_link a mask after each
token.
Decides nothing about scheduling.
"""
