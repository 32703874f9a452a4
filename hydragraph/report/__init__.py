"""The report: what a simulation, a plan or a run has to say, as one HTML file that needs no network.

simulated, planned, trained   what is known -> `facts` (frozen data)
timelines, traffic, memory    the same for one strategy: bars, bytes between ranks, bytes held
sections, charts              facts -> HTML and SVG, which say everything without JavaScript
page                          sections -> one file, with report.css and report.js beside it in this folder
"""
