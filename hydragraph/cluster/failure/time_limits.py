"""Time limits of failure detection, in seconds during which the detector itself runs.

A `NodeAgent` supervises a machine that does not lead.

    limit          maximum duration of                                            then
    ENDED_S        waiting for the launcher to report an ended process            its rank has failed
    SUSPECT_S      a stop of a process while a rank looks for an error's cause    its rank has failed
    PATIENCE_S     the search for the cause of a communication error              the rank with the error has failed
    UNHEARD_S      silence of a machine, as seen by another's link probe          the pair counts as broken
    STOPPED_S      a stop of a process while others run                           its rank has failed
    CUT_S          a broken pair of machines that both reach the leader           the leader drops one of them
    UNREACHABLE_S  silence of the store, or of the leader as seen by a NodeAgent  a rank or a NodeAgent gives up
    SILENT_S       silence of a machine's sentinel, or of a NodeAgent             the machine is lost
    PROGRESS_S     waits of ranks while no rank makes progress                    a rank that does not wait has failed
    RETURN_S       absence of machines that may have been lost with a leader      the next leader continues without them

The limits depend on each other:

- ENDED_S < SUSPECT_S < PATIENCE_S, so that the search finds a process that ended or stopped.
- UNHEARD_S + 3 s + 2 s <= CUT_S, and 6.2 s < UNREACHABLE_S, so that an outage of 3 s is not a failure. After an
  outage, probes recover within 2 s, and TCP retries after 0.2, 0.6, 1.4, 3.0 and 6.2 s.
- UNREACHABLE_S < SILENT_S, so that a disconnected machine ends its ranks before other machines continue without them.

`supervision/leadership.py` contains the limits of an elected leader.
"""

from __future__ import annotations

from hydragraph.spec.elastic import Elastic

ENDED_S = 0.5
SUSPECT_S = 1.5
PATIENCE_S = 2.5
UNHEARD_S = 1.0
STOPPED_S = 6.0
CUT_S = 6.0
UNREACHABLE_S = 7.0
SILENT_S = 8.0
PROGRESS_S = Elastic.progress_s
RETURN_S = 60.0
