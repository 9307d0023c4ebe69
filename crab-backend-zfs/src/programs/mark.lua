-- Marks a snapshot.
local args = ...
for property, value in pairs(args.marks) do
    local errno = zfs.sync.set_prop(args.snapshot, property, value)
    if errno ~= 0 then
        return errno
    end
end
return 0
