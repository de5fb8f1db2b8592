"""What the server of `joined` imports last: it leaves what it has loaded to its forks as it is.

Or the garbage collection of each fork would look at all of it, and copy the memory that it is in.
"""

import gc

gc.collect()
gc.freeze()
