"""A rank without an engine: joins its job; rank 0 prints how it got the secret, and the hosts of all ranks.

Usage: join_job.py SIZE [insecure]"""

import json
import sys

from yalis.launch.join import join

world = join(int(sys.argv[1]), [], 10, insecure=sys.argv[2:] == ["insecure"])
squares = world.all_gather_object(world.rank**2)
links = world.open_links(0)
if world.rank == 0:
    for rank, link in links.items():
        link.send(["hello", rank])
    assert [link.receive() for link in links.values()] == squares[1:]
    hosts = [[member.host, member.node, member.local_rank] for member in world.members]
    print(json.dumps([str(world._key.method), hosts]), flush=True)
else:
    assert links[0].receive() == ["hello", world.rank]
    links[0].send(squares[world.rank])
world.close()
