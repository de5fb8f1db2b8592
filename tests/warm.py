"""What the server of `joined` imports last: it leaves what it has loaded to its forks as it is.

Or the garbage collection of each fork would look at all of it, and copy the memory that it is in.
"""

import functools
import gc
import inspect

from utils import comparison

# git tells the commit of this code once for all forks, not to each in 20 ms.
comparison.commit = functools.cache(comparison.commit)
comparison.commit()
# torchrun asks for its callers, for whose modules Python looks through thousands each time.
inspect.getmodule = lambda *_: None
gc.freeze()
