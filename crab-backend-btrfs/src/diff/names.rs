//! Where things stand while the steps from an old tree to a new one are done, as far as the steps touch them.
//!
//! Steps name things by the paths of their moment: a file that is new stands under a number first, a directory that
//! gets another's name steps aside. What is asked in the end: where did it stand in the old tree, and where does it
//! stand in the new one?

use std::collections::HashMap;

use super::tree::{join, split};

/// A name in the tree, for as long as it is there.
type Id = usize;

const ROOT: Id = 0;

#[derive(Debug, Default)]
struct Node {
    /// Where it stands now; `None` for the root, and for what is gone.
    place: Option<(Id, Vec<u8>)>,
    /// Where it stood in the old tree, where it did.
    origin: Option<Vec<u8>>,
    /// What stands in it, as far as a step named it; `None` where something stood that is gone.
    children: HashMap<Vec<u8>, Option<Id>>,
    /// Whether it is named by a step, and not only on the way to something.
    touched: bool,
}

/// The tree, as far as steps touched it.
#[derive(Debug)]
pub(super) struct Names {
    nodes: Vec<Node>,
}

/// What became of one name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Fate {
    /// Its path in the old tree, where it stood there.
    pub(super) old: Option<Vec<u8>>,
    /// Its path in the new tree, where it stands there.
    pub(super) new: Option<Vec<u8>>,
}

impl Names {
    pub(super) fn new() -> Self {
        Self { nodes: vec![Node { origin: Some(Vec::new()), ..Node::default() }] }
    }

    /// What stands at a path now. What no step named before stands where it stood in the old tree.
    fn at(&mut self, path: &[u8]) -> Id {
        let mut at = ROOT;
        for name in path.split(|byte| *byte == b'/').filter(|name| !name.is_empty()) {
            at = match self.nodes[at].children.get(name) {
                Some(Some(id)) => *id,
                known => {
                    // A step that names what is gone is not expected; it is then taken for something new.
                    let origin = if known.is_some() { None } else { self.nodes[at].origin.as_deref() };
                    let origin = origin.map(|origin| join(origin, name));
                    self.put(at, name, Node { origin, ..Node::default() })
                }
            };
        }
        at
    }

    fn put(&mut self, parent: Id, name: &[u8], mut node: Node) -> Id {
        let id = self.nodes.len();
        node.place = Some((parent, name.to_vec()));
        self.nodes.push(node);
        self.nodes[parent].children.insert(name.to_vec(), Some(id));
        id
    }

    /// Something new stands at a path.
    pub(super) fn make(&mut self, path: &[u8]) {
        let (parent, name) = split(path);
        let parent = self.at(parent);
        self.put(parent, name, Node { touched: true, ..Node::default() });
    }

    /// What stands at a path is gone.
    pub(super) fn remove(&mut self, path: &[u8]) {
        let id = self.at(path);
        self.nodes[id].touched = true;
        self.detach(id);
    }

    fn detach(&mut self, id: Id) {
        if let Some((parent, name)) = self.nodes[id].place.take() {
            self.nodes[parent].children.insert(name, None);
        }
    }

    /// What stands at a path stands at another from now on.
    pub(super) fn rename(&mut self, path: &[u8], to: &[u8]) {
        let id = self.at(path);
        let (parent, name) = split(to);
        let parent = self.at(parent);
        if let Some(Some(over)) = self.nodes[parent].children.get(name).copied() {
            self.nodes[over].touched = true;
            self.detach(over);
        }
        self.detach(id);
        self.nodes[id].touched = true;
        self.nodes[id].place = Some((parent, name.to_vec()));
        self.nodes[parent].children.insert(name.to_vec(), Some(id));
    }

    /// Something about what stands at a path is changed. Gives a number for it that stays.
    pub(super) fn touch(&mut self, path: &[u8]) -> usize {
        let id = self.at(path);
        self.nodes[id].touched = true;
        id
    }

    fn path(&self, id: Id) -> Option<Vec<u8>> {
        let mut names = Vec::new();
        let mut at = id;
        while at != ROOT {
            let (parent, name) = self.nodes[at].place.as_ref()?;
            names.push(name.as_slice());
            at = *parent;
        }
        names.reverse();
        Some(names.join(&b'/'))
    }

    /// What became of everything that a step named, with the numbers that [`touch`](Self::touch) gave.
    pub(super) fn fates(&self) -> impl Iterator<Item = (usize, Fate)> {
        let touched = self.nodes.iter().enumerate().filter(|(_, node)| node.touched);
        touched.map(|(id, node)| (id, Fate { old: node.origin.clone(), new: self.path(id) }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fates(names: &Names) -> Vec<(String, String)> {
        let text = |path: Option<Vec<u8>>| path.map_or_else(|| "-".to_owned(), |path| String::from_utf8(path).unwrap());
        let mut all: Vec<_> = names.fates().map(|(_, fate)| (text(fate.old), text(fate.new))).collect();
        all.retain(|fate| *fate != ("-".to_owned(), "-".to_owned()));
        all.sort();
        all
    }

    fn pairs(expected: &[(&str, &str)]) -> Vec<(String, String)> {
        expected.iter().map(|(old, new)| ((*old).to_owned(), (*new).to_owned())).collect()
    }

    #[test]
    fn a_new_file_under_a_number_ends_where_it_is_put() {
        let mut names = Names::new();
        names.make(b"o257-7-0");
        names.rename(b"o257-7-0", b"dir/new");
        assert_eq!(fates(&names), pairs(&[("-", "dir/new")]));
    }

    #[test]
    fn two_directories_that_change_places_carry_what_is_in_them() {
        let mut names = Names::new();
        names.rename(b"a", b"o1");
        names.rename(b"b", b"a");
        names.rename(b"o1", b"b");
        names.touch(b"b/inner/file");
        names.touch(b"a/other");
        assert_eq!(
            fates(&names),
            pairs(&[("a", "b"), ("a/inner/file", "b/inner/file"), ("b", "a"), ("b/other", "a/other")])
        );
    }

    #[test]
    fn what_takes_the_place_of_something_gone_is_not_the_same() {
        let mut names = Names::new();
        names.remove(b"dir/file");
        names.make(b"o9");
        names.rename(b"o9", b"dir/file");
        names.remove(b"only");
        assert_eq!(fates(&names), pairs(&[("-", "dir/file"), ("dir/file", "-"), ("only", "-")]));
    }

    #[test]
    fn what_moves_into_something_that_moves_later_ends_there() {
        let mut names = Names::new();
        names.make(b"o5");
        names.rename(b"x/file", b"o5/file");
        names.rename(b"o5", b"deep/new");
        names.rename(b"deep", b"deeper");
        assert_eq!(fates(&names), pairs(&[("-", "deeper/new"), ("deep", "deeper"), ("x/file", "deeper/new/file")]));
    }

    #[test]
    fn what_comes_back_to_its_place_did_not_move() {
        let mut names = Names::new();
        names.rename(b"dir", b"o3");
        names.rename(b"o3", b"dir");
        assert_eq!(fates(&names), pairs(&[("dir", "dir")]));
    }
}
