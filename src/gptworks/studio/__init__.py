"""The studio: a page for using runs and looking into them.

browser ─► serve's guard ─► page (static files) · play (texts), read ─► loaded (engines) ─► library (run folders)

library     the run folders below the given ones        play        texts with the probabilities of their tokens
loaded      engines loaded on demand, bounded           page        the static files and their headers
runs        the curves of many runs                     feed        one thread reads their logs for all clients
app         the server's app with the studio's routes   state       objects that the routes share
start       recipes: a form, plan, starting runs        checking    a recipe's text, in a process with limits
processes   runs that train, as processes               form        the form, from the recipe's schema
read        causes of one token; when it was learned    reading     a text under one checkpoint; the runs' data
data        documents, windows, the batch of a step     answers     JSON and events
model       a model's parts, costs and weights          tries       results of `gptworks try`
static/     the page itself: no build step
"""
