"""Watches what a run does to a folder, and rebuilds what a power cut may leave of it.

`Watch` calls a function around each operation of Python. `Recording` is such a function: it lists
all changes of the folder, in their order, those of C++ too, since it compares the folder before and
after each operation. `states` then returns each state that a power cut may leave, on a file system
that promises no more than POSIX does:

- The content of a file is safe from the moment it is flushed. What was written later may be lost,
  cut short, or zeros.
- A name in a folder is safe from the moment that folder is flushed. Of later names, removals and
  renames, any may be lost: all, each alone, all but one, and the last ones.
"""

import builtins
import collections
import contextlib
import functools
import io
import os
import shutil

CHANGES = ('open', 'mkdir', 'rmdir', 'remove', 'unlink', 'rename', 'replace', 'truncate', 'fsync')
Name = collections.namedtuple('Name', 'folder name child')  # child: None if removed
State = collections.namedtuple('State', 'tree reached')  # tree: path -> bytes, or None of a folder


class Watch(contextlib.ExitStack):
    """Calls around(operation, path) of each operation below `root`, a context, within `with`."""

    def __init__(self, root, around):
        super().__init__()
        self._root, self._around = os.path.realpath(root) + os.sep, around

    def __enter__(self):
        self._open = builtins.open
        for module, name, function in [(builtins, 'open', self._opened), (io, 'open', self._opened)
                                       ] + [(os, name, self._watched(name)) for name in CHANGES]:
            self.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, function)
        return self

    def _around_path(self, operation, path, dir_fd=None):
        """Returns the context of an operation on a path, or on a descriptor."""
        path = os.fsdecode(path) if not isinstance(path, int) else _place(path)
        if dir_fd is not None:
            path = os.path.join(_place(dir_fd), path)
        folder, name = os.path.split(path)
        path = os.path.join(os.path.realpath(folder), name)
        inside = (path + os.sep).startswith(self._root)
        return self._around(operation, path) if inside else contextlib.ExitStack()

    def _watched(self, name):
        real = getattr(os, name)

        def watched(path, *arguments, dir_fd=None, **more):
            if dir_fd is not None:
                more['dir_fd'] = dir_fd
            with self._around_path(name, path, dir_fd):
                return real(path, *arguments, **more)
        return watched

    def _opened(self, file, mode='r', buffering=-1, encoding=None, errors=None, newline=None,
                **more):
        if isinstance(file, int) or 'opener' in more:  # the latter has no name
            return self._open(file, mode, buffering, encoding, errors, newline, **more)
        with self._around_path('open', file):
            if not set(mode) & set('wax+') or not os.path.realpath(file).startswith(self._root):
                return self._open(file, mode, buffering, encoding, errors, newline, **more)
            raw = _Raw(file, mode.replace('b', '').replace('t', ''))
        raw.around = self._around
        if buffering == 0:
            return raw
        stream = (io.BufferedRandom if '+' in mode else io.BufferedWriter)(raw)
        return stream if 'b' in mode else io.TextIOWrapper(stream, encoding, errors, newline)


def _place(descriptor):
    return os.readlink('/proc/self/fd/{}'.format(descriptor))


class _Raw(io.FileIO):
    """Is a file whose writes are watched."""

    def write(self, content):
        with self.around('write', os.path.realpath(self.name)):
            return super().write(content)


class Recording:
    """Lists the changes of the folder `root`: Names, (file, content), flushes, and marks."""

    def __init__(self, root):
        self._root, self._ids, self.changes = root, {}, []
        self._folders, self._files = self.first = self._seen()

    @contextlib.contextmanager
    def __call__(self, operation, path):
        if operation == 'write':  # `states` cuts what was written between two other operations
            yield
            return
        self._compare()
        yield
        self._compare()
        if operation == 'fsync':
            self.changes.append(('flush', self._ids[os.stat(path).st_ino], path))

    def mark(self, what):
        """Records that from now on `what` must survive; marks are compared by their order."""
        self._compare()
        self.changes.append(('mark', what))

    def _seen(self):
        """Returns id -> {name: id} of all folders, and id -> bytes of all files."""
        folders, files, found = {}, {}, {}

        def see(path):
            number = os.lstat(path).st_ino
            identity = found[number] = self._ids.get(number, len(self._ids) and 1 + max(
                self._ids.values()))
            self._ids[number] = identity
            if os.path.isdir(path):
                folders[identity] = {name: see(os.path.join(path, name))
                                     for name in sorted(os.listdir(path))}
            else:
                with io.FileIO(path) as file:
                    files[identity] = file.read()
            return identity
        see(self._root)
        self._ids = found  # the system may use the number of a removed file again
        return folders, files

    def _compare(self):
        before, contents, (folders, files) = self._folders, self._files, self._seen()
        self.changes += [('write', identity, content) for identity, content in files.items()
                         if content != contents.get(identity)]
        names = [Name(folder, name, folders.get(folder, {}).get(name))
                 for folder in sorted(set(before) | set(folders))
                 for name in sorted(set(before.get(folder, ())) | set(folders.get(folder, ())))
                 if before.get(folder, {}).get(name) != folders.get(folder, {}).get(name)]
        while names:
            one = names.pop(0)
            moved = before.get(one.folder, {}).get(one.name)  # elsewhere, if this is a rename
            both = [each for each in names if one.child is None and each.child == moved or (
                one.child is not None
                and before.get(each.folder, {}).get(each.name) == one.child)]
            names = [each for each in names if each not in both]
            self.changes.append(('names', tuple([one] + both)))
        self._folders, self._files = folders, files


def states(recording, lose=lambda path: False):
    """Returns all different States that a power cut may leave, each with its last mark.

    lose: path of a file or folder -> whether flushing it has no effect.
    """
    folders, safe = recording.first
    safe, newest, pending, reached, found = dict(safe), dict(safe), [], None, {}
    folders = {folder: dict(names) for folder, names in folders.items()}
    for change in [('mark', None)] + recording.changes:
        if change[0] == 'mark':
            reached = change[1]
        elif change[0] == 'names':
            pending.append(change[1])
        elif change[0] == 'write':
            newest[change[1]] = change[2]
        elif not lose(change[2]):
            safe[change[1]] = newest.get(change[1], b'')
            for names in [each for each in pending if any(n.folder == change[1] for n in each)]:
                _apply(folders, names)
                pending.remove(names)
        for names in _subsets(pending):
            now = {folder: dict(inside) for folder, inside in folders.items()}
            for each in names:
                _apply(now, each)
            paths = dict(_paths(now))
            for content in _contents(set(paths.values()) & set(newest), safe, newest):
                tree = {path: content.get(identity) for path, identity in paths.items()}
                found[hash(frozenset(tree.items()))] = State(tree, reached)
    return list(found.values())


def _apply(folders, names):
    for folder, name, child in names:
        folders.setdefault(folder, {}).pop(name, None)
        if child is not None:
            folders[folder][name] = child


def _subsets(pending):
    """Returns what may have reached the disk of a list of changes, each in their order."""
    indices = range(len(pending))
    kept = {tuple(range(n)) for n in range(len(pending) + 1)}
    kept |= {(i,) for i in indices} | {tuple(j for j in indices if j != i) for i in indices}
    return [[pending[i] for i in some] for some in sorted(kept)]


def _paths(folders, folder=0, parent=''):
    """Yields (path, id) of all that can be reached from the root."""
    for name, child in folders.get(folder, {}).items():
        yield parent + name, child
        yield from _paths(folders, child, parent + name + os.sep)


def _contents(reachable, safe, newest):
    """Returns dicts id -> content that files may have, from all that was written to nothing new."""
    found = {i: newest[i] for i in reachable}
    changed = [i for i in sorted(reachable) if newest[i] != safe.get(i, b'')]
    partly = {i: _partly(safe.get(i, b''), newest[i]) for i in changed}
    lost = [dict(found) for _ in range(3)]
    for kind, content in enumerate(lost):
        content.update({i: partly[i][kind] for i in changed})
    every = [found] + lost
    for i in changed:
        for content in partly[i]:
            every.append(dict(found))
            every[-1][i] = content
        every.append(dict(lost[0]))
        every[-1][i] = newest[i]
    return every


@functools.lru_cache(None)  # bytes remember their hash, so equal trees are found quickly
def _partly(old, new):
    """Returns the old content, half of what is new, and its length in zeros."""
    same = len(old) if new.startswith(old) else len(os.path.commonprefix([old, new]))
    return old, new[:(same + len(new)) // 2], new[:same] + bytes(len(new) - same)


def write_tree(tree, root):
    """Makes `root` hold exactly this tree."""
    shutil.rmtree(root, ignore_errors=True)
    os.makedirs(root)
    for path, content in sorted(tree.items()):
        path = os.path.join(root, path)
        if content is None:
            os.mkdir(path)
        else:
            with open(path, 'wb') as file:
                file.write(content)
