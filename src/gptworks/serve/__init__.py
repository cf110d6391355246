"""The server: engines behind OpenAI's HTTP interface.

connection ─► protocol ─► guard ─► app ─► generate ─► engine loop ─► slots
              (headers,   (key,    (routes)  (prompts,  (a thread
               slow       bodies,            choices)    per model)
               peers)     deadlines)

settings    every bound, in one place        errors      what goes wrong, in OpenAI's shape
openai      requests and responses           tokens      text to ids and back
models      which models there are           embeddings  /v1/embeddings
metrics     /metrics                         server      start, signals, drain
caller      who asks: shares, costs          log         a line for each request
"""
