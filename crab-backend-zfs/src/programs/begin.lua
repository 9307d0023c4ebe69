-- Writes the journal of a restore and keeps the state that it replaces, both or none.
local args = ...
if args.snapshot then
    local errno = zfs.sync.snapshot(args.snapshot)
    if errno ~= 0 then
        return errno
    end
    for property, value in pairs(args.marks) do
        if errno == 0 then
            errno = zfs.sync.set_prop(args.snapshot, property, value)
        end
    end
    if errno ~= 0 then
        zfs.sync.destroy(args.snapshot)
        return errno
    end
end
local errno = zfs.sync.set_prop(args.home, "crab:restore", args.journal)
if errno ~= 0 and args.snapshot then
    zfs.sync.destroy(args.snapshot)
end
return errno
