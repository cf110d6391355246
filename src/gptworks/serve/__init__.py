"""The server: engines behind an OpenAI-compatible HTTP API.

connection ─► protocol ─► guard ─► app ─► generate ─► engine loop ─► slots
              (headers,   (key,    (routes)  (prompts,  (a thread
               slow       bodies,            choices)    per model)
               peers)     deadlines)

settings    access and limits                errors      errors in OpenAI's format
openai      requests and responses           completions /v1/completions and chat
models      the models and their tokenizers  embeddings  /v1/embeddings
metrics     /metrics                         server      start, signals, drain
service     the state that routes share      log         a line for each request
"""
