"""How the ranks that are left meet again after a failure, and how others join them: generations.

protocol      pure: what a supervisor decides and what a member answers, given what everybody has said
place         the keys of a store through which they speak
member        a rank's side: it meets, makes the new world's process group, and hears when it is called
supervisor    the processes: started, watched, replaced, and told of each other's deaths
nodes         several machines: the leader, its links to the others, and the processes there
deputy        the supervisor of a machine that does not lead
"""
