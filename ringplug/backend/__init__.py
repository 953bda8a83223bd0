"""The engine room: knows buffers, never a framework's training loop.

Rooms, in layer order; a module imports from lower layers or from its own room's protocol.

0. ``errors`` the error tree; ``config`` settings, the only reader of the environment;
   ``parsing`` what people write in them; ``horovod`` which of Horovod's variables have no
   effect; ``log``
1. ``world`` who is here; ``handle`` one submitted operation; ``stall`` waiting with a deadline;
   ``buffers`` dtypes and reductions; ``adapters/`` framework tensors as arrays; ``trace/`` the
   timeline; ``same_settings`` checks those of all ranks; ``hooks`` what a rank does
   when it dies of an exception
2. ``control/`` messages between ranks; ``transport/`` collectives on flat buffers (protocol and
   arithmetic); ``fusion`` what shares a bucket; ``compression/`` what the wire carries;
   ``request`` and ``coordinator`` what named operations ask for, and what rank 0 makes of it;
   ``xla_ffi`` XLA custom calls whose body is Python
3. the implementations in ``transport/``; ``reduction`` and ``adasum``, on any transport
4. ``lane`` operations in order on one transport; ``execution`` what agreed named operations do;
   ``traced`` what they look like in a timeline
5. ``plan`` the hot lane; ``named`` the named lane, and ``pending`` what is in flight on
   it; ``process_set`` some of the ranks
6. ``runtime`` everything one rank holds, from init to shutdown; ``groups`` its process sets
7. ``ops`` named operations on framework tensors; ``place`` rank, size and relatives;
   ``probes`` what this installation can do; ``timeline`` recording one while a program runs

Data flows one way: framework tensor, adapter view, bucket, wire payload, transport, and back
into the same view. Upward go only handles and exceptions.
"""
