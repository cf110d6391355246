"""The studio: a web page for using runs and looking into them.

browser ─► serve's guard ─► page (static files) · play (texts), read ─► loaded (engines) ─► library (run folders)

library     finds run folders below the given ones      play        texts with the probabilities of their tokens
loaded      loads engines; limits memory of idle ones   page        the static files and their headers
runs        curves of many runs, results of tries       feed        reads runs' logs in one thread for all clients
app         the server's app with the studio's routes   state       objects that the routes share
start       a recipe's form and plan; starting runs     checking    checks a recipe's text in a limited process
processes   training runs as processes                  form        the form, from the recipe's schema
read        the loss of each token, and its causes      reading     reads a text with a checkpoint; opens runs' data
data        documents, windows, the batch of a step     answers     JSON and events
model       a model's parts, costs and weights          folders     folders, files and recipes that a user has
recipes     reads runs' recipes in a limited process    resuming    what changes if a run resumes with a recipe
home        the first screen: a recipe for a folder     drafting    drafts a recipe for a folder in a process
static/     the page itself: no build step
"""
