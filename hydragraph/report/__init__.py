"""Every report and picture: what a plan, a simulation or a run has to say, as frozen facts, then HTML or SVG, or a
figure.

plan_report, simulation_report, run_report    what is known -> `facts`
timelines, traffic, memory                    the same for one strategy
sections, charts                              facts -> HTML and SVG, complete without JavaScript
page                                          sections -> one file, with report.css and report.js of this folder

Nothing here measures or plans.
"""
