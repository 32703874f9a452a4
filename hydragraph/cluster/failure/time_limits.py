"""Time limits of failure detection, in seconds during which the detector itself runs.

A `NodeAgent` supervises a machine that does not lead. `supervision/leadership.py` has the limits of elected leaders.

    limit          maximum duration of                                    then
    ENDED_S        the launcher's delay in reporting an ended process     its rank has failed
    SUSPECT_S      a process's stop while a rank seeks an error's cause   its rank has failed
    PATIENCE_S     the search for a communication error's cause           the rank with the error has failed
    UNHEARD_S      a machine's silence to another's link probe            the pair is broken
    STOPPED_S      a process's stop while others run                      its rank has failed
    CUT_S          a broken pair of machines that both reach the leader   the leader drops one
    UNREACHABLE_S  silence of the store, or of a NodeAgent's leader       a rank or NodeAgent gives up
    SILENT_S       silence of a machine's sentinel or NodeAgent           the machine is lost
    PROGRESS_S     waits of ranks without progress of any rank            a rank that does not wait has failed
    RETURN_S       absence of machines perhaps lost with a leader         the next leader continues without them

- ENDED_S < SUSPECT_S < PATIENCE_S: the search must find a process that ended or stopped.
- UNHEARD_S + 3 s + 2 s <= CUT_S, and 6.2 s < UNREACHABLE_S: an outage of 3 s is not a failure. Afterwards, probes
  recover within 2 s, and TCP retries after 0.2, 0.6, 1.4, 3.0 and 6.2 s.
- UNREACHABLE_S < SILENT_S: a disconnected machine ends its ranks before others continue without them.
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
