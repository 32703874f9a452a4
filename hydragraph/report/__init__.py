"""Reports and pictures of plans, simulations and runs, as HTML, SVG or matplotlib figures.

plan_report, simulation_report, run_report    collect a report's contents (`facts`)
timelines, bytes_moved, memory_held           compute contents about one strategy
sections, charts                              convert contents to HTML and SVG without JavaScript
page                                          writes sections to one file
"""
