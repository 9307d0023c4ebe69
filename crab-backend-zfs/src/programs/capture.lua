-- Takes snapshots and marks them, all at one moment. Returns why those that failed did.
local args = ...
local failed = {}
for snapshot, wanted in pairs(args.snapshots) do
    local why = nil
    if zfs.exists(wanted.dataset) then
        for child in zfs.list.children(wanted.dataset) do
            why = why or { errno = 0, child = child }
        end
    else
        why = { errno = 2 }
    end
    if zfs.exists(wanted.home) then
        -- The name may be taken on a dataset that was the root once.
        local short = string.sub(snapshot, #wanted.dataset + 1)
        for branch in zfs.list.children(wanted.home) do
            if zfs.exists(branch .. short) then
                why = why or { errno = 17 }
            end
        end
    end
    if not why then
        local errno = zfs.sync.snapshot(snapshot)
        if errno ~= 0 then
            why = { errno = errno }
        else
            for property, value in pairs(wanted.marks) do
                if errno == 0 then
                    errno = zfs.sync.set_prop(snapshot, property, value)
                end
            end
            if errno ~= 0 then
                why = { errno = errno }
                zfs.sync.destroy(snapshot)
            end
        end
    end
    if why then
        failed[snapshot] = why
    end
end
return failed
