"""The studio: one page on which people use their runs and look into them.

browser ─► serve's guard ─► page (static files) · play (texts), read ─► loaded (engines) ─► library (run folders)

library     the run folders below the given ones        play        what the models write, and why
loaded      engines loaded on demand, bounded           page        the static files and their headers
runs        the curves of many runs                     feed        one thread reads their logs for all clients
app         the server's app with the studio's routes   state       what the routes share
start       recipes: a form, plan, runs to start        checking    a recipe's text, in a process with limits
processes   runs that train, as processes               form        the form, from the recipe's schema
read        why, and since when, of each token          reading     a text under one checkpoint, off the event loop
data        documents, windows, what a step took        run_data    a run's prepared data, opened and checked
static/     the page itself: no build step
"""
