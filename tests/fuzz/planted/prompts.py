"""Faults in how prompts that rows share are computed once."""

from tests.fuzz.planted.fault import faults

ALL = faults("""
rows share the token in which they begin to differ
passes/unpad/agreeing.py shared_batch; shared prompts: a row gets another row's token
- leader = torch.where(at < common[:, :, None], row[:, None], batch).amin(1)
+ leader = torch.where(at <= common[:, :, None], row[:, None], batch).amin(1)

rows that agree later share again
passes/unpad/agreeing.py shared_batch; shared prompts: what stood before a token is not asked
- common = torch.where(differ, at, length).amin(2)
+ common = torch.where(differ, at, length).amax(2)

what tells rows apart is not compared
passes/unpad/agreeing.py shared_batch; shared prompts: padding alone tells rows apart
- numbers = [real, *(_number(x) for x in compared)]
+ numbers = [real]

padding is not compared
passes/unpad/agreeing.py shared_batch; shared prompts: a token of padding stands for one that is real
- numbers = [real, *(_number(x) for x in compared)]
+ numbers = [_number(x) for x in compared]

a window over shared prompts is one wider
passes/unpad/agreeing.py shared_batch; shared prompts: a token sees one key more
- before[:, (at - left).clamp(min=0)]
+ before[:, (at - left - 1).clamp(min=0)]

a token does not see itself
passes/unpad/agreeing.py shared_batch; shared prompts: intervals end a key early
- ends = torch.stack(firsts).reshape(len(windows), -1), (start + seen).reshape(-1)
+ ends = torch.stack(firsts).reshape(len(windows), -1), (start + (seen - 1).clamp(min=1)).reshape(-1)

a token may see later ones
passes/unpad/sharing.py check_pairs; shared prompts: a token is computed with another row's keys behind it
- if not own.band.causal and own.band.right != 0:
+ if False:
""")
