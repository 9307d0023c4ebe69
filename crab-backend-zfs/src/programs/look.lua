-- Describes datasets. Those that do not exist are left out.
local args = ...
local found = {}
for name in pairs(args.names) do
    if zfs.exists(name) then
        local about = {
            kind = (zfs.get_prop(name, "type")),
            guid = (zfs.get_prop(name, "guid")),
            origin = (zfs.get_prop(name, "origin")),
            keys = (zfs.get_prop(name, "keystatus")),
            clone = (zfs.get_prop(name, "crab:clone")),
            journal = (zfs.get_prop(name, "crab:restore")),
            format = (zfs.get_prop(name, "crab:format")),
            created = (zfs.get_prop(name, "creation")),
            resume = (zfs.get_prop(name, "receive_resume_token")),
            children = {},
            snapshots = {},
            carried = {},
        }
        for child in zfs.list.children(name) do
            about.children[child] = true
        end
        for snapshot in zfs.list.snapshots(name) do
            about.snapshots[snapshot] = true
        end
        -- What was set on the dataset itself, and not above it.
        for property in pairs(args.carry) do
            local value, source = zfs.get_prop(name, property)
            if source == name then
                about.carried[property] = value
            end
        end
        found[name] = about
    end
end
return found
