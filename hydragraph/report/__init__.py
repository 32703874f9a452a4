"""Reports and pictures of plans, simulations and runs, as HTML, SVG or matplotlib figures.

plan_report, simulation_report, run_report    inputs -> `facts`
timelines, bytes_moved, memory_held           facts of one strategy
sections, charts                              facts -> HTML and SVG, complete without JavaScript
page                                          sections -> one file
"""
